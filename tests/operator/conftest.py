"""Quiet logs: a failing test shows states, not the operator's story of a hundred schedules."""

from __future__ import annotations

import logging

import structlog

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
