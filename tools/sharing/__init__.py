"""Makes recordings ready to share: a part of one, or one without names."""
