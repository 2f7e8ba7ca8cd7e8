"""What a stored number is: elements, formats, the catalog of named ones, and how encoding rounds. Standard library only."""
