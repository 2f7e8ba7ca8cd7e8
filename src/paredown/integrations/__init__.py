"""Thin adapters for Hugging Face's Trainer, Lightning and loggers, and help when memory runs out; imported when asked for."""
