"""Passes from Program to Program, one file each, and the representation that they work on."""
