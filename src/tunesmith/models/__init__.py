"""Base models and adapters: what their files say, loading, chat templates, tokens, scores."""
