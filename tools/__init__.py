"""The offline tools: what reads recordings, anywhere and later. Nothing here imports torch."""
