"""The saved activations of eager sessions: packed in the forward pass, decoded in backward."""
