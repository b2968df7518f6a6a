"""All ranks on one timeline: `build` makes tracks of events, `perfetto` and `chrome` write them."""
