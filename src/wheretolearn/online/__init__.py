"""Online learning: one stream of tasks that change at unknown times, each batch predicted before it is learned from."""
