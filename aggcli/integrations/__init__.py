"""aggcli inside other people's trainers: each module needs the trainer's own package, an extra of aggcli's."""
