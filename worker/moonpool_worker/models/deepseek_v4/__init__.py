"""The parts of DeepSeek-V4 that no other family has; ``families/deepseek_v4.py`` puts them together."""
