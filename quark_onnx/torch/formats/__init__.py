"""Codecs: tensors to integer codes and packed bits, and back."""
