"""The decoder in plain PyTorch: OLMo (dense) or OLMoE (sparse) by configuration."""
