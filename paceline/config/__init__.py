"""Configurations of the commands: frozen values, one a component, checked once at construction.

The command line derives from them: a flag's name, default and help have their one home here.
"""
