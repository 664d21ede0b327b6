"""Files on disk: atomic writes with hashes, safetensors."""
