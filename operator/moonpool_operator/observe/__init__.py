"""What is there now: LIST and GET, parsed into frozen dataclasses. Nothing is kept between two reconciles."""
