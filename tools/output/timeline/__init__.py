"""All ranks on one timeline: `build` creates tracks of events, `perfetto` writes them."""
