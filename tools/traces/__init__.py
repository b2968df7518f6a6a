"""Files of traces, whoever wrote them: where they are, what they are and of which rank."""
