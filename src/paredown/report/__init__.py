"""What was tried, picked and trained, as one value and one page."""
