"""The decoder: OLMo (dense) or OLMoE (sparse) by configuration. No process group is known here."""
