"""Which plan to take: arithmetic on traces, plans and measured errors."""
