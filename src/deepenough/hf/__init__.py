"""The only place that knows the internals of Hugging Face models.

`OWN_CLASSES` says which module defines a class of deepenough's own models, by the name that stands
as `architectures` in their `config.json`; importing it makes transformers know the class. What
stands above the core fills it, so that the core knows no method.
"""

OWN_CLASSES: dict[str, str] = {}
