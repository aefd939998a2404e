"""Pure decisions of serving: which adapter to evict, whether an engine hangs."""
