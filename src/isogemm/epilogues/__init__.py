"""The epilogue library: what may follow a product in the same launch."""

from isogemm.epilogues.spec import ACTIVATIONS, Activation, UserEpilogue, of_module, options_of, recognise, register

__all__ = ["ACTIVATIONS", "Activation", "UserEpilogue", "of_module", "options_of", "recognise", "register"]
