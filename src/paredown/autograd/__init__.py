"""Reading a live step: the table of operations, autograd's graph, the watch over modules, hooks and activation checkpointing."""
