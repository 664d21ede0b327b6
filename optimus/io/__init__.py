"""Files on disk: atomic writes, hashes and safetensors files."""
