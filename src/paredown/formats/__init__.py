"""Number formats: elements, formats, the catalog of named formats, and rounding modes. Standard library only."""
