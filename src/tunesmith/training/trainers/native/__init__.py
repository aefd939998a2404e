"""Our own trainer: LoRA by supervised fine-tuning, on CPU or GPU, resumable to the bit on a CPU."""
