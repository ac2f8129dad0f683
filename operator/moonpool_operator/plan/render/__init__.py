"""Desired children as plain manifests."""
