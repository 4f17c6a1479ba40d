"""zhooks where users already are: Accelerate, Lightning, and the Trainer of transformers.

Each module needs its library, which an extra installs, and is imported by its name: `from zhooks.integrations import
transformers as zh`.  Nothing of a library is patched; what it offers to subclasses is used.
"""
