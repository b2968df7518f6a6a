"""All ranks on one timeline: `build` makes tracks of events, `perfetto` writes them."""
