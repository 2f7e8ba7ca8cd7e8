"""Packs the saved activations of eager sessions in the forward pass, and decodes them in backward."""
