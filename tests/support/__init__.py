"""What several tests share: comparisons, values worth trying, and a meter of scratch memory."""
