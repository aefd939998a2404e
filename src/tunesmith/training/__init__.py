"""The train stage, its memory plan and its trainers."""
