"""Builds the images of Tandem: a target of the Dockerfile for each service."""
