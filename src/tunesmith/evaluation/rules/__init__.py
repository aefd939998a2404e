"""Pure decisions about evaluation: comparison, gate, outliers."""
