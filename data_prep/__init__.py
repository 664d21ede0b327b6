"""Data preparation: conversion of text files to a shuffled and sharded data set of token instances.

The modules do not import torch. docs/formats/dataset.md describes the format.
"""
