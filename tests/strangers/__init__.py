"""Files and texts of strangers: malformed, huge, hostile, of another version."""
