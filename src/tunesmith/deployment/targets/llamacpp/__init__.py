"""The llama.cpp target: its own server processes, or an external one."""
