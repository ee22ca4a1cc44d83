"""Many ranks as one worker: who they are, how they talk, and what happens when one fails."""
