"""A trained model in other programs' formats, each compared with the model before it is done."""
