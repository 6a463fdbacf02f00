"""How the built-in model orin-guide is made.

`facts` and `sources` say what it knows. `conversations`, `starting` (how a model is started), `signs` (emoji, accents)
and `corpus` write its training data, `train` trains it (with PyTorch), `export` writes its GGUF file, and `evaluate`
asks it the held-out questions.
"""
