"""Decoder models in plain PyTorch. The configuration selects OLMo (dense) or OLMoE (sparse)."""
