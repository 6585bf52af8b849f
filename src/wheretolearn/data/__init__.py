"""Image sets: where they come from, how they are cached, and how tasks and streams are drawn from them."""
