"""How the bundled model is made: data, tokenizer, training and a reference evaluation. See README.md."""
