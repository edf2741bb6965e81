"""Every request of a commit gets every answer; nothing untrue is said, and no checkpoint goes lost."""
