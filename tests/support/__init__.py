"""What tests share: builders, servers to talk to, worlds to work in. One builder per thing."""
