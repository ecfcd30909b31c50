"""Text to tokens and back: tokenizers, chat templates, incremental detokenizing, stop strings. Knows no HTTP."""
