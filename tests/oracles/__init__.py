"""Answers that come from the definition alone, with exact fractions; nothing here imports the package."""
