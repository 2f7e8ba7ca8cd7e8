"""Which plan to take: arithmetic on outlines, traces, plans and measured errors; nothing here runs a model."""
