"""Thin adapters for Hugging Face's Trainer and for Lightning, loggers, and what to say when memory runs out; imported when asked for."""
