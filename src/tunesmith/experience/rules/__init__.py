"""Pure decisions about experiences: classes, mix, held-out cases."""
