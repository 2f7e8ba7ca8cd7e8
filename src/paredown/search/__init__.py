"""Which formats to take: arithmetic on outlines, traces, plans and trials; nothing here runs a model."""
