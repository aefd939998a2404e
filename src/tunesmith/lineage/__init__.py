"""Where a version came from and what became of it: the graph, its drawing, provenance statements, model cards."""
