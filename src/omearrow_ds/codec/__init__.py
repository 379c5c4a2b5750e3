"""Codec of OME-Arrow columns: conversion to arrays and back."""
